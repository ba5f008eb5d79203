"""The memory plan: device.py determines what is available, workspace.py what a step needs, budget.py how the KV budget
is divided; plan.py combines them.
"""

from .plan import MARGIN, Plan, make_plan

__all__ = ["MARGIN", "Plan", "make_plan"]
