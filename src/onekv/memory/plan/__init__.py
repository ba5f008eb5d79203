"""Where the bytes go: device.py says what there is, workspace.py what a step needs, budget.py how the KV budget is
divided; plan.py puts them together.
"""

from .plan import MARGIN, Plan, make_plan

__all__ = ["MARGIN", "Plan", "make_plan"]
