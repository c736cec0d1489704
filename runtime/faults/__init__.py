"""Faults on demand: production code asks a plan at named points what is to go wrong there.

``if faults.plan is not None: faults.plan.reach("chain.record")`` is all a point is; without a plan
it costs one attribute test. Which points there are stands in ``points``, what a plan does in
``plan``. A process takes its plan from the environment when this room is first imported, so that
guard, session, trainer ranks and engines of one run follow the same one.
"""

from __future__ import annotations

from runtime.faults.plan import Fault, FaultPlan, Fired, Kind, from_environment

__all__ = ["Fault", "FaultPlan", "Fired", "Kind", "plan"]

plan: FaultPlan | None = from_environment()
"""The plan of this process; None in production."""
