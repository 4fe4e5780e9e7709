"""Tokenizers that need no network, each knowing the Megatron flags that train with its ids.

Byte level: id = byte value, 256 = end of document. BPE: a local HuggingFace `tokenizers` model.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

EOD_TOKEN = "<|endoftext|>"
# A pad token of its own, or Megatron cannot tell padding from text in a short validation sample.
PAD_TOKEN = "<|pad|>"
MIN_BPE_VOCAB_SIZE = 256 + 2


class TokenizerError(ValueError):
    """The tokenizer cannot be read or made as asked; the message says what to do."""


class Tokenizer(Protocol):
    """Turns documents into token ids."""

    vocab_size: int
    """Number of ids, before Megatron pads it."""
    eod: int
    """Id of the end-of-document token."""

    def encode(self, documents: Sequence[bytes]) -> list[npt.NDArray[np.integer[Any]]]:
        """Return the ids of each document (UTF-8), without an end-of-document token."""
        ...

    def megatron_flags(self) -> list[str]:
        """Return the flags with which Megatron builds the same vocabulary at training time."""
        ...


class ByteTokenizer:
    """Each byte is its own id, so any input is exactly representable; nothing to store."""

    vocab_size = 257
    eod = 256

    def encode(self, documents: Sequence[bytes]) -> list[npt.NDArray[np.integer[Any]]]:
        """Return the bytes as ids 0..255."""
        return [np.frombuffer(document, dtype=np.uint8) for document in documents]

    def megatron_flags(self) -> list[str]:
        """Megatron's own ByteLevelTokenizer is behind no flag and takes id 0 as end of document.

        The NullTokenizer carries just what training needs: a size and an end of document, which is
        the last id.
        """
        return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(self.vocab_size)]


class BPETokenizer:
    """A HuggingFace tokenizer read from a local folder, as Megatron reads it."""

    def __init__(self, folder: Path) -> None:
        """Read `tokenizer.json`, and the end-of-document token from `tokenizer_config.json`.

        Raises:
            TokenizerError: a file is missing or broken, or no end-of-document token is named.
        """
        self.folder = folder
        self._model = _read_model(folder / "tokenizer.json")
        # The name of a special token inside a document is text, not the end of the document.
        self._model.encode_special_tokens = True
        token = _eos_token(folder / "tokenizer_config.json")
        eod = self._model.token_to_id(token)
        if eod is None:
            raise TokenizerError(f"{folder}: the vocabulary lacks the eos_token {token!r}")
        self.eod: int = eod
        self.vocab_size: int = self._model.get_vocab_size(with_added_tokens=True)

    def __reduce__(self) -> tuple[type["BPETokenizer"], tuple[Path]]:
        # Worker processes read the folder again: the model's own pickle forgets its settings.
        return BPETokenizer, (self.folder,)

    def encode(self, documents: Sequence[bytes]) -> list[npt.NDArray[np.integer[Any]]]:
        """Return the ids without begin or end tokens; bytes that are not UTF-8 become U+FFFD."""
        texts = [document.decode("utf-8", errors="replace") for document in documents]
        encodings = self._model.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def megatron_flags(self) -> list[str]:
        """A folder is needed: Megatron (AutoTokenizer) cannot read a bare json file."""
        folder = str(self.folder)
        return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder]


def train_bpe(texts: Iterable[bytes], vocab_size: int, path: Path) -> Path:
    """Train a byte-level BPE and save it for `load_bpe(path)`.

    The result depends on the texts only, not on the machine. A corpus too small for `vocab_size`
    gives a smaller vocabulary.

    Args:
        texts: documents (UTF-8).
        vocab_size: at least 258: all bytes, end of document, padding.
        path: a folder, or a .json file beside which the folder is made.

    Returns:
        The folder that Megatron reads.

    Raises:
        TokenizerError: `vocab_size` is too small.
    """
    if vocab_size < MIN_BPE_VOCAB_SIZE:
        raise TokenizerError(
            f"vocabulary size {vocab_size} is too small: {MIN_BPE_VOCAB_SIZE} are needed for the "
            "256 bytes, end of document and padding"
        )
    model = HFTokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[EOD_TOKEN, PAD_TOKEN],
        show_progress=False,
    )
    model.train_from_iterator((text.decode("utf-8", errors="replace") for text in texts), trainer)
    folder = _folder_of(path)
    folder.mkdir(parents=True, exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    if path.suffix == ".json":
        model.save(str(path))
    _write_config(folder, EOD_TOKEN, PAD_TOKEN)
    return folder


def load_bpe(path: Path, eod_token: str | None = None) -> BPETokenizer:
    """Read a tokenizer; what the folder lacks for Megatron (the end-of-document token) is added.

    Args:
        path: a folder that holds tokenizer.json, or a .json file of the `tokenizers` library.
        eod_token: end-of-document token, needed if neither tokenizer_config.json nor one of the
            usual names tells it.

    Raises:
        TokenizerError: nothing usable is there, or `eod_token` is not what the folder says.
    """
    folder = _folder_of(path)
    model_file = path if path.suffix == ".json" else path / "tokenizer.json"
    if not model_file.exists():
        raise TokenizerError(
            f"tokenizer does not exist: {model_file}; train one with --train-tokenizer VOCAB_SIZE"
        )
    model = _read_model(model_file)
    folder_file, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not folder_file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        folder_file.write_bytes(model_file.read_bytes())
    elif folder_file.read_bytes() != model_file.read_bytes():
        raise TokenizerError(f"{folder_file} is not the tokenizer of {model_file}: remove one")
    if not config.exists():
        _write_config(folder, eod_token or _usual_eod(model, model_file), None)
    if eod_token is not None and _eos_token(config) != eod_token:
        raise TokenizerError(f"{config} says eos_token {_eos_token(config)!r}, not {eod_token!r}")
    return BPETokenizer(folder)


def _folder_of(path: Path) -> Path:
    """Return the folder for Megatron: x/tokenizer.json -> x, x.json -> x, x -> x."""
    if path.name == "tokenizer.json":
        return path.parent
    return path.with_suffix("") if path.suffix == ".json" else path


def _read_model(path: Path) -> HFTokenizer:
    if not path.exists():
        raise TokenizerError(f"tokenizer does not exist: {path}")
    try:
        return HFTokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more special
        raise TokenizerError(f"{path} is no model of the tokenizers library ({error})") from error


def _write_config(folder: Path, eod_token: str, pad_token: str | None) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eod_token,
        "clean_up_tokenization_spaces": False,
    }
    if pad_token is not None:
        config["pad_token"] = pad_token
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _eos_token(config: Path) -> str:
    """Read the token that Megatron takes as end of document."""
    try:
        token = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError) as error:
        raise TokenizerError(f"cannot read {config}: {error}") from error
    # Written either as text or as a serialized AddedToken.
    token = token.get("content") if isinstance(token, dict) else token
    if not isinstance(token, str):
        raise TokenizerError(f"{config} names no eos_token, which ends documents: add one")
    return token


def _usual_eod(model: HFTokenizer, path: Path) -> str:
    for token in (EOD_TOKEN, "</s>", "<|end_of_text|>", "<eos>"):
        if model.token_to_id(token) is not None:
            return token
    raise TokenizerError(f"{path}: which token ends a document? Say it with --eod-token")
