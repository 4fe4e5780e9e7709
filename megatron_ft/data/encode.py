"""From records to token ids, in one process or several, always in the order of the records."""

import contextlib
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron_ft.data.corpus import CorpusError, Record, documents
from megatron_ft.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

# A batch goes to a worker when it reaches either: big enough to hide the cost of the queue.
_BATCH_BYTES = 1 << 20
_BATCH_RECORDS = 1024
_MAX_DOCUMENT_TOKENS = int(np.iinfo(np.int32).max)


@dataclass(frozen=True)
class EncodedKey:
    """The documents of one key in a batch."""

    tokens: npt.NDArray[np.integer[Any]]
    """Ids of all documents behind each other."""
    lengths: list[int]
    """Number of ids of each document, none of them zero."""
    num_empty: int
    """Documents without text, which are left out."""


@dataclass(frozen=True)
class EncodedBatch:
    """What a few consecutive records became."""

    keys: list[EncodedKey]
    """One entry for each key, in the order of the keys."""
    num_text_bytes: int
    num_not_utf8: int
    num_bytes_read: int
    """Bytes of the corpus as stored behind this batch."""


@dataclass(frozen=True)
class Encoder:
    """Turns a batch of records into ids; sent once to each worker."""

    tokenizer: Tokenizer
    keys: tuple[str, ...]
    append_eod: bool
    dtype: type[np.integer[Any]]

    def __call__(self, records: Sequence[Record]) -> EncodedBatch:
        """Encode one batch.

        Raises:
            CorpusError: a record has not the documents asked for, or one is too long to be indexed.
        """
        by_record = [documents(record, self.keys) for record in records]
        texts = [text for texts in by_record for text in texts]
        return EncodedBatch(
            keys=[
                self._encode_key(records, [texts[number] for texts in by_record])
                for number in range(len(self.keys))
            ],
            num_text_bytes=sum(map(len, texts)),
            num_not_utf8=sum(not _is_utf8(text) for text in texts),
            num_bytes_read=sum(record.num_bytes_read for record in records),
        )

    def _encode_key(self, records: Sequence[Record], texts: list[bytes]) -> EncodedKey:
        parts = []
        for record, ids in zip(records, self.tokenizer.encode(texts), strict=True):
            if len(ids) == 0:
                continue
            if len(ids) >= _MAX_DOCUMENT_TOKENS:
                raise CorpusError(f"{record.place}: {len(ids)} tokens are too many, split the text")
            ids = ids.astype(self.dtype)
            parts.append(np.append(ids, self.dtype(self.tokenizer.eod)) if self.append_eod else ids)
        return EncodedKey(
            tokens=np.concatenate(parts) if parts else np.empty(0, self.dtype),
            lengths=[len(part) for part in parts],
            num_empty=len(texts) - len(parts),
        )


def encode_corpus(
    records: Iterable[Record], encoder: Encoder, num_workers: int
) -> Generator[EncodedBatch]:
    """Yield the encoded batches in the order of the records.

    The batches, and so the result, do not depend on `num_workers`; 1 means this process alone.

    Raises:
        CorpusError: an input cannot be read or parsed, or a worker process died.
    """
    batches = _batched(records)
    if num_workers == 1:
        yield from map(encoder, batches)
        return
    workers = [_Worker(encoder) for _ in range(num_workers)]
    try:
        # Batch k belongs to worker k mod n. A worker has one batch at a time: with more, it could
        # wait for its result to be read while this process waits for its batch to be read.
        busy: deque[_Worker] = deque()
        idle = deque(workers)
        for batch in batches:
            if idle:
                worker = idle.popleft()
                worker.send(batch)
                busy.append(worker)
                continue
            worker = busy.popleft()
            result = worker.receive()
            worker.send(batch)
            busy.append(worker)
            yield result
        while busy:
            yield busy.popleft().receive()
    finally:
        for worker in workers:
            worker.end()


def _batched(records: Iterable[Record]) -> Iterator[list[Record]]:
    batch: list[Record] = []
    num_bytes = 0
    for record in records:
        batch.append(record)
        num_bytes += len(record.data)
        if num_bytes >= _BATCH_BYTES or len(batch) == _BATCH_RECORDS:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


class _Worker:
    """A process that encodes batches; pipes and no locks, so that it may be killed at any time."""

    def __init__(self, encoder: Encoder) -> None:
        # No fork: this process may hold threads and locks of torch.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, encoder), daemon=True)
        self._process.start()
        # Theirs alone, so that the death of either side ends the other's reading.
        theirs.close()

    def send(self, batch: list[Record]) -> None:
        try:
            self._connection.send(batch)
        except OSError as error:
            raise self._dead() from error

    def receive(self) -> EncodedBatch:
        try:
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._dead() from error
        if isinstance(answer, CorpusError):
            raise answer
        assert isinstance(answer, EncodedBatch)
        return answer

    def end(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.join()

    def _dead(self) -> CorpusError:
        self._process.join()
        return CorpusError(
            f"a worker process died (exit code {self._process.exitcode}), perhaps for want of "
            "memory; try fewer --workers"
        )


def _work(
    connection: "Connection[EncodedBatch | CorpusError, list[Record]]", encoder: Encoder
) -> None:
    """Encode batches until the main process closes its end or is gone."""
    # An interrupt at the terminal reaches the whole process group; the main process ends the work.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Parallelism is by processes here.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Closed or broken, the pipe says that the main process has no more use for this one.
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            batch = connection.recv()
            try:
                answer: EncodedBatch | CorpusError = encoder(batch)
            except CorpusError as error:
                answer = error
            connection.send(answer)
