"""From settings to a remote tier: which store, which secret, and for which model."""

from pathlib import Path

from ...config import Settings
from ...errors import SettingError
from ...memory.layout import Rule
from ...memory.plan import Plan
from ...units import parse_size
from ..base import STATES
from ..folder import model_hash
from ..image import images_of
from .common import Setup
from .seal import Sealer
from .stores import Store
from .tier import RemoteTier
from .url import Place, parse

# As a secret: there is none, and that is meant.
NONE = "none"
LEAST_SECRET = 16
# Seconds after which a thread stops waiting for a store; requests do so sooner.
PATIENCE = 5.0


def check(settings: Settings) -> tuple[Place, str | None] | None:
    """Where the store is, and the secret; None if there is to be none. Raises SettingError."""
    if settings.remote_tier is None:
        return None
    place = parse(settings.remote_tier, settings.remote_password)
    return place, _secret(settings.tier_secret, place)


def open_remote(settings: Settings, plan: Plan, stored: str) -> RemoteTier | None:
    """The remote tier for the model whose blocks are `stored_as` that, there and on disk; None if `settings` say that
    there is none. Nothing is asked of the store.
    """
    if (checked := check(settings)) is None:
        return None
    place, secret = checked
    sealer = Sealer(model_hash(stored), secret, plan.block_size)
    reads: dict[int, int | None] = {
        part: _blocks(group.rule, plan.block_size) for part, group in enumerate(plan.layout.groups)
    }
    setup = Setup(
        _open_store(place, max(PATIENCE, place.timeout or 0.0)),
        place.shown,
        sealer,
        images_of(plan.layout, plan.block_size),
        plan.block_size,
        reads | {STATES: 1},
        place.timeout,
        settings.remote_write,
    )
    rate = parse_size(settings.remote_write_rate, name="--remote-write-rate")
    return RemoteTier(setup, plan.remote_out, plan.remote_in, rate)


def _open_store(place: Place, timeout: float) -> Store:
    """The store at `place`, of which nothing has been asked yet. Raises SettingError if a package is missing."""
    try:
        if place.kind == "valkey":
            from .valkey import ValkeyStore

            return ValkeyStore(place, timeout)
        from .objects import ObjectStore

        return ObjectStore(place, timeout)
    except ImportError as error:
        raise SettingError(
            f"--remote-tier is {place.shown}, but {error.name} is not installed; pip install 'onekv[remote]'"
        ) from None


def _blocks(rule: Rule, size: int) -> int | None:
    """How many blocks a sequence refers to at most; None is all of them."""
    return None if rule.span is None else -(-(rule.span + rule.keep) // size) + 2


def _secret(text: str | None, place: Place) -> str | None:
    if text is None:
        if not place.private:
            raise SettingError(
                f"--remote-tier is {place.shown}, and anyone who can write there could feed this server forged KV; "
                f"set the same --tier-secret on all servers, or --tier-secret {NONE} to trust them all"
            )
        return None
    if text == NONE:
        return None
    if text.startswith("@"):
        try:
            text = Path(text[1:]).expanduser().read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(f"--tier-secret is {text!r}, which cannot be read: {error}") from None
    if len(text) < LEAST_SECRET:
        raise SettingError(f"--tier-secret has {len(text)} characters; it must have at least {LEAST_SECRET}")
    return text
