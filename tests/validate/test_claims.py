"""The paper's claims about orders: each has a check, and its cells are those that it prints."""

from __future__ import annotations

from validate.claims import PaperClaims
from validate.figures import Predictions, Scope


def test_every_claim_has_a_check() -> None:
    claims = PaperClaims(Predictions(Scope()))
    for key, claim in claims.predictions.printed["order_claims"].items():
        assert callable(getattr(claims, key))
        assert claim.keys() == {"place", "claim"}


def test_bold_cells_are_those_of_the_paper() -> None:
    cells = list(PaperClaims(Predictions(Scope())).cells())
    assert len(cells) == 20
    bold = {cell.case for cell in cells if cell.is_bold}
    at_10 = {f"10GB/s, {tokens} on {gpus}" for tokens in ("2k", "4k", "8k", "12k") for gpus in (2, 4)}
    assert bold == at_10 | {"1GB/s, 2k on 2", "1GB/s, 8k on 2", "1GB/s, 12k on 2", "1GB/s, 12k on 4"}
    assert {cell.case for cell in cells if cell.is_tie} == {"10GB/s, 1k on 2", "10GB/s, 1k on 4"}


def test_where_the_prediction_disagrees_the_case_is_wrong() -> None:
    claims = PaperClaims(Predictions(Scope()))
    for case, agrees in claims.falcon_4k():
        assert agrees == (float(case.rpartition("(")[2].rstrip(")")) < 1.02)
    for case, agrees in claims.falcon_8k():
        gain = float(case.rpartition("(")[2].rstrip(")"))
        assert agrees == (gain > 1.0) or gain == 1.0, "printed with three digits"
