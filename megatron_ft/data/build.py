"""From a corpus to Megatron's .bin/.idx: reading, encoding and writing put together."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.data.corpus import Corpus, CorpusError
from megatron_ft.data.encode import Encoder, encode_corpus
from megatron_ft.data.indexed import PairWriter, token_dtype
from megatron_ft.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Summary:
    """What a build made."""

    prefixes: list[Path]
    """Prefix of each pair, as for --data-path; one for each key."""
    num_documents: list[int]
    """Documents in each pair."""
    num_empty: int
    """Documents without text that were left out, of all keys."""
    num_not_utf8: int
    """Documents that are not valid UTF-8, of all keys."""
    num_tokens: int
    """Tokens in all pairs, end-of-document tokens among them."""
    num_text_bytes: int
    """Bytes of text, uncompressed and without what JSON adds."""
    seconds: float


def build_pairs(
    corpus: Corpus,
    tokenizer: Tokenizer,
    output_prefix: Path,
    *,
    keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    num_workers: int = 1,
    on_progress: Callable[[int], None] = lambda num_bytes_read: None,
) -> Summary:
    """Write `<output_prefix>_<key>_document.bin/.idx` for each key, every pair whole or not there.

    Args:
        on_progress: called with the bytes of the corpus read since the last call.

    Raises:
        CorpusError: the corpus cannot be read, or has no text.
        OSError: the output cannot be written.
    """
    start = time.monotonic()
    dtype = token_dtype(tokenizer.vocab_size)
    encoder = Encoder(tokenizer, tuple(keys), append_eod, dtype)
    num_empty = num_not_utf8 = num_text_bytes = 0
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(
                PairWriter(output_prefix.with_name(f"{output_prefix.name}_{key}_document"), dtype)
            )
            for key in keys
        ]
        batches = stack.enter_context(
            contextlib.closing(encode_corpus(corpus, encoder, num_workers))
        )
        for batch in batches:
            for writer, encoded in zip(writers, batch.keys, strict=True):
                writer.add(encoded.tokens, encoded.lengths)
                num_empty += encoded.num_empty
            num_not_utf8 += batch.num_not_utf8
            num_text_bytes += batch.num_text_bytes
            on_progress(batch.num_bytes_read)
        for writer, key in zip(writers, keys, strict=True):
            if writer.num_documents == 0:
                raise CorpusError(f"no text under {key!r} in {corpus.name}: nothing to train on")
        for writer in writers:
            writer.commit()
    return Summary(
        prefixes=[writer.prefix for writer in writers],
        num_documents=[writer.num_documents for writer in writers],
        num_empty=num_empty,
        num_not_utf8=num_not_utf8,
        num_tokens=sum(writer.num_tokens for writer in writers),
        num_text_bytes=num_text_bytes,
        seconds=time.monotonic() - start,
    )
