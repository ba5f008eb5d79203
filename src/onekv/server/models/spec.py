"""The models of a server: those on the command line, and one for each [models.NAME] table of the TOML file.

A table's values override those at the top level of the file; flags and variables override both. Two names for the same
weights are one model with two names, even if the second refers to a copy of the files. A table with a `base` is an
adapter over the weights of that model, which are in memory once, so the settings of the base determine how they are
loaded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...config import Settings, there_are
from ...errors import SettingError
from ...models.loader import display_name, local_path
from ...models.same import other_use, same_adapter, same_weights
from ..model_settings import ModelSettings, names
from .settings import BudgetSettings

# What a table cannot say of one model: they are about all of them.
_COMMON = {"any_model", "disk_cache", "disk_limit", "disk_write_budget"}
# What decides how weights are loaded: an adapter's are its base's.
LOADED_BY = ("dtype", "kernels")
KNOWN = [
    "model",
    "base",
    "keep",
    *(name for name in (*ModelSettings.names(), *Settings.names()) if name not in _COMMON),
]


@dataclass(frozen=True)
class ModelSpec:
    """One model: what requests call it first, what is loaded, and its settings; other names are its aliases."""

    name: str
    model: str
    engine: Settings
    served: ModelSettings
    keep: str
    # What the model without its adapter is called, where it has one.
    base: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.name, *self.served.alias)))

    @property
    def weights(self) -> tuple[str | None, ...]:
        """The same for the same file or folder, loaded in the same way, whatever adapter is around it."""
        return _place(self.model), *(getattr(self.engine, name) for name in LOADED_BY)

    @property
    def adapter(self) -> str | None:
        return None if self.engine.adapter is None else _place(self.engine.adapter)


def _place(name: str) -> str:
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


# Settings of one model from the file: the TOML file's top level and the model's table, merged.
Resolve = Callable[[Mapping[str, Any]], tuple[Settings, ModelSettings, BudgetSettings]]


def specs_of(given: Sequence[str], tables: Any, resolve: Resolve) -> list[ModelSpec]:
    """The models `given` by name, path or the name of a table, in that order, then the other tables."""
    tables = _checked(tables)
    found = [_spec(name, tables.get(name), resolve, first=index == 0) for index, name in enumerate(given)]
    for name in tables:
        if name not in given:
            found.append(_spec(name, tables[name], resolve, first=not found))
    called = {**{spec.name: spec for spec in found}, **dict(zip(given, found, strict=False))}
    found = [_with_base(spec, tables.get(spec.name, {}), called) for spec in found]
    _check_adapters(found, tables)
    specs = _merged(_without_copies(found))
    _check_names(specs)
    return specs


def _checked(tables: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(tables, dict):
        raise SettingError(f"models in the TOML file is {tables!r}; it must be tables such as [models.coder]")
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise SettingError(f"models.{name} in the TOML file is {table!r}; it must be a table")
        for key in table:
            if key in _COMMON:
                raise SettingError(f"models.{name} sets {key!r}, which applies to all models; set it above the tables")
            if key not in KNOWN:
                raise SettingError(f"models.{name} sets {key!r}; {there_are(key, KNOWN)}")
    return tables


def _spec(name: str, table: dict[str, Any] | None, resolve: Resolve, first: bool) -> ModelSpec:
    engine, served, budget = resolve(table or {})
    if not first:
        # --alias and the file's own are names of the first.
        given = (table or {}).get("alias", ())
        served = replace(served, alias=names(given, f"alias of models.{name}"))
    if table is None:
        return ModelSpec(display_name(name), name, engine, served, budget.keep)
    return ModelSpec(name, str(table.get("model", name)), engine, served, budget.keep)


def _with_base(spec: ModelSpec, table: dict[str, Any], called: dict[str, ModelSpec]) -> ModelSpec:
    """An adapter with the weights of its base. Raises SettingError if that cannot be."""
    where = f"models.{spec.name}"
    if "base" not in table:
        return spec if spec.engine.adapter is None else replace(spec, base=display_name(spec.model))
    given = str(table["base"])
    base = called.get(given)
    if "adapter" not in table:
        raise SettingError(f"{where} sets base but no adapter; give the folder written by mlx_lm.lora")
    if "model" in table:
        raise SettingError(f"{where} sets both base and model; the weights are the base's, so give base alone")
    if base is None or base is spec:
        others = ", ".join(repr(name) for name, other in called.items() if other is not spec) or "none"
        raise SettingError(
            f"{where} sets base = {given!r}, which is not another model of this server; others: {others}"
        )
    if base.engine.adapter is not None:
        raise SettingError(f"{where} sets base = {given!r}, which is itself an adapter; give its base model")
    loaded = {name: getattr(base.engine, name) for name in LOADED_BY}
    for name, value in loaded.items():
        if name in table and getattr(spec.engine, name) != value:
            raise SettingError(
                f"{where} sets {name} = {table[name]!r}, but its weights are those of {given!r}, with {name} "
                f"{value or 'not set'}; set it there"
            )
    return replace(spec, model=base.model, engine=replace(spec.engine, **loaded), base=base.name)


def _check_adapters(specs: list[ModelSpec], tables: dict[str, dict[str, Any]]) -> None:
    """Of several models, an adapter is one's own: given in its table."""
    for spec in specs if len(specs) > 1 else ():
        adapter = spec.engine.adapter
        if adapter is not None and tables.get(spec.name, {}).get("adapter") != adapter:
            raise SettingError(
                f"--adapter is {adapter!r}, and there are {len(specs)} models; set adapter in the table of the one it "
                "is for, such as [models.NAME]"
            )


def _without_copies(specs: list[ModelSpec]) -> list[ModelSpec]:
    """Where files have the same content, the first of them for all. Raises SettingError if they are used otherwise."""
    found: list[ModelSpec] = []
    for spec in specs:
        model = next((other.model for other in found if _same_model(spec, other)), spec.model)
        adapter = next((other.engine.adapter for other in found if _same_adapter(spec, other)), spec.engine.adapter)
        found.append(replace(spec, model=model, engine=replace(spec.engine, adapter=adapter)))
    return found


def _same_model(spec: ModelSpec, other: ModelSpec) -> bool:
    if spec.model == other.model:
        return True
    mine, its = local_path(spec.model), local_path(other.model)
    if mine is None or its is None or not same_weights(mine, its):
        return False
    if (file := other_use(mine, its)) is not None:
        raise SettingError(
            f"{other.name!r} and {spec.name!r} have the same weights in two folders, {its} and {mine}, which differ in "
            f"{file}, and weights are loaded once; remove one of the models, or make the files the same"
        )
    return True


def _same_adapter(spec: ModelSpec, other: ModelSpec) -> bool:
    mine, its = spec.adapter, other.adapter
    return mine is not None and its is not None and same_adapter(Path(mine), Path(its))


def _merged(specs: list[ModelSpec]) -> list[ModelSpec]:
    """Those of the same weights and adapter as one. Raises SettingError if their settings differ."""
    merged: dict[Any, ModelSpec] = {}
    for spec in specs:
        # Not with how they are loaded: that is a setting, too.
        same = (_place(spec.model), spec.adapter)
        before = merged.get(same)
        if before is None:
            merged[same] = spec
            continue
        served = replace(spec.served, alias=before.served.alias)
        if (spec.engine, served, spec.keep) != (before.engine, before.served, before.keep):
            raise SettingError(
                f"{before.name!r} and {spec.name!r} are the same weights with other settings, and weights are loaded "
                "once; give both the same settings, or one of them the other's name as alias"
            )
        alias = (*before.served.alias, *spec.names)
        merged[same] = replace(before, served=replace(before.served, alias=alias))
    return list(merged.values())


def _check_names(specs: list[ModelSpec]) -> None:
    owners: dict[str, ModelSpec] = {}
    for spec in specs:
        for name in spec.names:
            if name == "default":
                raise SettingError("a model cannot be called 'default': that is what the first one is called")
            if name in owners:
                raise SettingError(f"{name!r} would name both {owners[name].model!r} and {spec.model!r}")
            owners[name] = spec
