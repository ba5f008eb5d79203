"""Runs single checks of `onekv doctor`, and looks at what they found."""

from onekv.doctor.base import Case, Check, Finding, Result, Status
from onekv.doctor.running import run_checks

KERNELS_OFF = "--kernels off (ONEKV_KERNELS=off)"


def examine(check: Check, case: Case | None = None) -> Result:
    (result,) = run_checks(case or Case(), [check])
    return result


def found(result: Result, status: Status = Status.FAILED) -> list[Finding]:
    return [finding for finding in result.findings if finding.status is status]


def clean(result: Result) -> bool:
    return result.status is Status.OK and not found(result, Status.WARNING)
