"""The text that the examples train on."""

from __future__ import annotations

from typing import Any

import pytest

from examples.text import load_text, split_into_sequences


class Letters:
    """A tokenizer with a token for each character."""

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}


class Words:
    """A tokenizer with a token for each word, numbered as it is written."""

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}


def test_the_king_james_bible_begins_at_the_beginning_and_has_no_brackets() -> None:
    text = load_text("bible")
    assert text.strip().startswith("In the beginning God created the heaven and the earth.")
    assert len(text) > 4_000_000
    assert "[" not in text


def test_a_path_is_read_as_a_file(tmp_path: Any) -> None:
    (tmp_path / "notes.txt").write_text("déjà vu", encoding="utf-8")
    assert load_text(str(tmp_path / "notes.txt")) == "déjà vu"


@pytest.mark.parametrize("tokenizer", [Letters(), Words()])
def test_held_out_sequences_come_after_all_training_sequences(tokenizer: Any) -> None:
    text = " ".join(str(number) for number in range(1000, 3000))
    train, held_out = split_into_sequences(text, tokenizer, 8, num_train=20, num_held_out=4)
    assert train.shape == (20, 8)
    assert held_out.shape == (4, 8)
    if isinstance(tokenizer, Words):
        assert train.flatten().tolist() == list(range(1000, 1160))
        first = int(held_out[0, 0])
        assert first > 2900
        assert held_out.flatten().tolist() == list(range(first, first + 32))


def test_a_short_text_gives_fewer_training_sequences_that_do_not_reach_into_the_held_out_ones() -> (
    None
):
    text = " ".join(str(number) for number in range(1000, 1200))
    train, held_out = split_into_sequences(text, Words(), 8, num_train=1000, num_held_out=4)
    assert 0 < len(train) < 25
    assert int(train.max()) < int(held_out.min())


def test_a_text_that_is_too_short_is_an_error_with_its_length() -> None:
    with pytest.raises(ValueError, match="the text has 5 characters: too few for 4 held-out"):
        split_into_sequences("1 2 3", Words(), 8, num_train=1, num_held_out=4)


def test_nothing_held_out_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one sequence must be held out"):
        split_into_sequences("1 2 3", Words(), 2, num_train=1, num_held_out=0)
