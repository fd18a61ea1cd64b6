"""What an asker is told who can't be answered."""

from __future__ import annotations

from http import HTTPStatus


class Refusal(Exception):
    """A sentence that says what was wrong and what to do, and the status that it goes with."""

    def __init__(self, status: HTTPStatus, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def bad(sentence: str) -> Refusal:
    """Return the refusal of a request that is wrong in itself."""
    return Refusal(HTTPStatus.BAD_REQUEST, sentence)


def unanswerable(sentence: str) -> Refusal:
    """Return the refusal of a question that is right and that nobody here can answer exactly."""
    return Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, sentence)


def not_found(sentence: str) -> Refusal:
    """Return the refusal of what names something that is not here."""
    return Refusal(HTTPStatus.NOT_FOUND, sentence)
