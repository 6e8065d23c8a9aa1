"""Words that figures and notebooks share."""

from __future__ import annotations

from kvrsim.results.results import Plan, SimResult


def question_line(answer: Plan | SimResult) -> str:
    """The question in one line."""
    question = answer.question
    return " · ".join((question.model, question.short(), answer.cluster.describe(), *question.kernels()))
