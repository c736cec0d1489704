"""How many groups may be skipped because their verification failed twice."""

from __future__ import annotations

import math

from runtime.data.samples import Prompt
from runtime.errors import DataBudgetExceeded, DataError

_SHOWN_CHARS = 500


class SkipBudget:
    """``reward.skip_budget``: a share of the prompts, 0 unless set.

    Args:
        share: of ``num_prompts``, 0..1; the whole number below it is the budget.
        num_prompts: prompts of all passes.
        num_skipped: skipped before, from the ledger: a resume does not start the budget over.
    """

    def __init__(self, share: float, num_prompts: int, *, num_skipped: int = 0) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"a skip budget is a share of the prompts, 0..1, not {share}")
        # 0.001 x 3000 is 2.9999999999999996 or 3 depending on the numbers: the nearest whole wins.
        self.limit = math.floor(share * num_prompts + 1e-9)
        self.num_skipped = num_skipped

    def charge(self, prompt: Prompt, error: DataError) -> None:
        """Charge one group; the caller then ends it as skipped.

        Raises:
            DataBudgetExceeded: with the example, if that is one too many.
        """
        self.num_skipped += 1
        if self.num_skipped > self.limit:
            raise DataBudgetExceeded(
                f"{self.num_skipped} groups could not be judged, reward.skip_budget allows "
                f"{self.limit}. Prompt {prompt.id} ({prompt.verifier}): {error.message}\n"
                f"prompt: {prompt.text[:_SHOWN_CHARS]!r}\n"
                f"answer: {prompt.answer!r:.{_SHOWN_CHARS}}",
                num_skipped=self.num_skipped,
                limit=self.limit,
                prompt=str(prompt.id),
                error=type(error).__name__,
                **error.detail,
            ) from error
