"""Sets up speculation from the settings, or gives the reason why there is none."""

from ..config import Settings
from ..errors import SettingError
from ..memory.plan import Plan
from ..prefix.cache import PrefixCache
from .runner import Runner
from .speculation.control import Proposer, Speculation
from .speculation.lookup import SHARED_TOKENS, Lookup


def make_speculation(
    settings: Settings, plan: Plan, runner: Runner, prefix: PrefixCache, proposer: Proposer | None
) -> tuple[Speculation | None, str | None]:
    """Speculation, or None and the reason. Without a `proposer`, what the settings say.

    Raises SettingError if it was requested by name and the model does not support it.
    """
    if settings.speculate == "off":
        return None, "--speculate is off"
    if (reason := runner.several.why_not) is not None:
        if settings.draft_model is not None:
            raise SettingError(f"--draft-model is {settings.draft_model!r}, which cannot be used here: {reason}")
        if settings.speculate != "auto":
            raise SettingError(
                f"--speculate is {settings.speculate!r}, which is not possible here: {reason}; "
                "auto speculates only where it is possible"
            )
        return None, reason
    if proposer is None and settings.speculate != "draft":
        proposer = Lookup(prefix.recent(SHARED_TOKENS))
    # What a step stores at once must have been promised.
    most = min(settings.draft_tokens, plan.prefill_chunk - 1)
    return Speculation(proposer, most, runner.drafting is not None), None
