"""What a mixture asks for: how many answers a row needs, and how long they may take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from pymoe.mixture.errors import TooFewAnswersError
from pymoe.mixture.fan_out import Answers, ExpertRequest, gather_answers
from pymoe.runtime.gradients import all_finite


class Rules(NamedTuple):
    """What a mixture asks for, in both passes."""

    k_min: int
    backward_k_min: int
    forward_timeout: float | None
    timeout_after_k_min: float | None
    backward_timeout: float | None
    detect_anomalies: bool
    raises: bool
    """Whether too few answers are an error."""

    def acceptable(self, answer: Sequence[Any]) -> bool:
        return not self.detect_anomalies or all_finite([one for one in answer if isinstance(one, Tensor)])

    def answers_of(
        self, mixture: str, requests: Sequence[ExpertRequest], needed_T: Tensor, *, backward: bool = False
    ) -> tuple[Answers, Tensor]:
        """What comes of ``requests``, and which rows have fewer answers than needed; raises where that is an error."""
        timeout = self.backward_timeout if backward else self.forward_timeout
        answers = gather_answers(
            requests, needed_T, timeout=timeout, timeout_after=self.timeout_after_k_min, acceptable=self.acceptable
        )
        few_T = answers.came < needed_T
        if self.raises and bool(few_T.any()):
            what, k_min = ("gradients", self.backward_k_min) if backward else ("answers", self.k_min)
            raise TooFewAnswersError(mixture, what, k_min, few_T, answers.failures)
        return answers, few_T
