"""What a mixture raises of its own."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pymoe._errors import describe_error


class TooFewAnswersError(RuntimeError):
    """Rows of a mixture got fewer answers, or fewer gradients, than they need.

    Attributes:
        rows: the numbers of these rows.
        failures: by backend, why its answer is missing. One of them is the ``__cause__``.
    """

    def __init__(self, name: str, what: str, k_min: int, few: Tensor, failures: Mapping[str, BaseException]) -> None:
        self.rows: list[int] = few.nonzero().flatten().tolist()
        self.failures = dict(failures)
        reasons = "; ".join(f"{backend}: {describe_error(why)}" for backend, why in failures.items())
        super().__init__(
            f"{name}: {len(self.rows)} of {len(few)} rows got fewer than {k_min} {what} ({reasons or 'nobody to ask'})"
        )
        # The expert's own exception where there is one: timeouts tell less.
        causes = sorted(failures.values(), key=lambda why: isinstance(why, TimeoutError))
        self.__cause__ = causes[0] if causes else None
