"""Text to .bin/.idx and back, read by Megatron's own classes built from Megatron's own flags."""

import argparse
import concurrent.futures
import contextlib
import gzip
import json
import multiprocessing
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training.arguments import add_megatron_arguments
from megatron.training.utils.common_utils import get_blend_and_blend_per_split
from tokenizers import Tokenizer as HFTokenizer
from tokenizers.processors import TemplateProcessing

from megatron_ft.data import prepare_default
from megatron_ft.data.corpus import StdlibCorpus
from megatron_ft.data.tokenizer import load_bpe

TOOL = Path(__file__).parent.parent / "tools" / "preprocess_data.py"
sys.path.insert(0, str(TOOL.parent))
import preprocess_data  # noqa: E402

# Children that need not import Megatron again.
FORK = multiprocessing.get_context("fork")
EOD = 256
TEXTS = ["Hello.\n", "naïve café — 日本語 🙂\r\n", "tab\tand\x00zero", "x"]


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Iterator[object]:
    """Run the tool in this process; returns exit code, output and error output."""
    handler = signal.getsignal(signal.SIGTERM)

    def run(*arguments: object) -> tuple[int, str, str]:
        code = preprocess_data.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    yield run
    signal.signal(signal.SIGTERM, handler)


def read(prefix: Path) -> list[list[int]]:
    """Return the ids of each document, and check that documents are what the index says."""
    dataset = IndexedDataset(str(prefix))
    np.testing.assert_array_equal(dataset.document_indices, np.arange(len(dataset) + 1))
    return [dataset[number].tolist() for number in range(len(dataset))]


def as_ids(texts: list[str], eod: bool = True) -> list[list[int]]:
    return [list(text.encode()) + [EOD] * eod for text in texts]


def megatron_arguments(output: str) -> argparse.Namespace:
    """Parse the flags of the tool's last line as Megatron does."""
    line = output.splitlines()[-1]
    assert line.startswith("Train with: ")
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    arguments = parser.parse_args(shlex.split(line.removeprefix("Train with: ")))
    arguments.rank = 0
    return arguments


def gpt_datasets(
    arguments: argparse.Namespace, sizes: tuple[int | None, ...], **options: object
) -> list[GPTDataset | None]:
    """Build train, valid and test datasets as a Megatron pretraining script does."""
    blend, blend_per_split = get_blend_and_blend_per_split(arguments)
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=16,
        blend=blend,
        blend_per_split=blend_per_split,
        split=arguments.split if blend_per_split is None else None,
        tokenizer=build_tokenizer(arguments),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=True,
        **options,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": 1, key: text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("compressed", [False, True])
def test_each_kind_of_input_comes_back(tool, tmp_path: Path, compressed: bool) -> None:
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    files = {"b.txt": 0, "sub/a.md": 1, "sub.txt": 2}
    for name, number in files.items():
        (folder / name).write_bytes(TEXTS[number].encode())
    (folder / "c.jsonl").write_text(json.dumps({"text": TEXTS[3]}) + "\n\n")
    (folder / "ignored.bin").write_bytes(b"no text")
    (folder / ".hidden.txt").write_bytes(b"hidden")
    (folder / ".git").mkdir()
    (folder / ".git" / "hidden.txt").write_bytes(b"hidden")
    single = write_jsonl(tmp_path / "single.json", TEXTS)
    plain = tmp_path / "no_suffix"
    plain.write_bytes(b"\xff\xfe raw bytes")
    inputs = [single, folder, plain]
    if compressed:
        for path in [single, *(path for path in folder.rglob("*") if path.is_file())]:
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
        inputs[0] = single.with_name("single.json.gz")
    code, output, _ = tool("--input", *inputs, "--output-prefix", tmp_path / "out", "--append-eod")
    assert code == 0
    # Inputs in the order given, a folder in the order of its paths.
    folder_texts = [TEXTS[0], TEXTS[3], TEXTS[2], TEXTS[1]]
    expected = [*as_ids(TEXTS + folder_texts), [*b"\xff\xfe raw bytes", EOD]]
    assert read(tmp_path / "out_text_document") == expected
    num_tokens = sum(map(len, expected))
    assert f"9 documents, {num_tokens:,} tokens, {num_tokens - 9:,} bytes of text" in output
    assert "1 documents are not UTF-8" in output


def test_keys_empty_documents_and_no_eod(tool, tmp_path: Path) -> None:
    lines = [{"title": "one", "body": "first"}, {"title": "", "body": "second"}]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    keys = ["--json-key", "title", "body"]
    code, output, _ = tool("--input", source, "--output-prefix", tmp_path / "v1.0", *keys)
    assert code == 0
    assert read(tmp_path / "v1.0_title_document") == as_ids(["one"], eod=False)
    assert read(tmp_path / "v1.0_body_document") == as_ids(["first", "second"], eod=False)
    assert "1 documents without text were left out" in output
    assert "documents run into each other" in output
    assert megatron_arguments(output).data_path == [
        str(tmp_path / "v1.0_title_document"),
        str(tmp_path / "v1.0_body_document"),
    ]


def test_gpt_dataset_yields_exactly_the_corpus(tool, tmp_path: Path) -> None:
    texts = [f"document {number} " + "é" * (number % 23) for number in range(60)]
    source = write_jsonl(tmp_path / "in.jsonl", texts)
    _, output, _ = tool("--input", source, "--output-prefix", tmp_path / "o", "--append-eod")
    arguments = megatron_arguments(output)
    arguments.split = "100,0,0"
    dataset, valid, test = gpt_datasets(arguments, (None, None, None))
    assert valid is None and test is None
    assert build_tokenizer(arguments).eod == EOD
    assert arguments.padded_vocab_size == 384
    # Put the shuffled samples in order again: they are the documents behind each other.
    order = np.argsort(dataset.shuffle_index)
    tokens = np.concatenate([dataset[int(number)]["tokens"].numpy() for number in order])
    documents = as_ids(texts)
    stream = np.concatenate([documents[number] for number in dataset.document_index])
    assert len(stream) - len(tokens) <= 17
    np.testing.assert_array_equal(tokens, stream[: len(tokens)])
    sample = dataset[0]
    np.testing.assert_array_equal(sample["tokens"][1:], sample["labels"][:-1])
    np.testing.assert_array_equal(sample["loss_mask"] == 0, sample["tokens"] == EOD)


def test_megatron_blending_flags(tool, tmp_path: Path) -> None:
    prefixes = []
    for name in ("a", "b"):
        source = write_jsonl(tmp_path / f"{name}.jsonl", [name * 40] * 30)
        _, output, _ = tool("--input", source, "--output-prefix", tmp_path / name)
        prefixes.append(str(tmp_path / f"{name}_text_document"))
    weighted = megatron_arguments(output)
    weighted.data_path = ["3", prefixes[0], "1", prefixes[1]]
    weighted.split = "80,10,10"
    datasets = gpt_datasets(weighted, (40, 8, 8), path_to_cache=str(tmp_path / "cache"))
    letters = [chr(datasets[0][number]["tokens"][0]) for number in range(40)]
    assert letters.count("a") == 30 and letters.count("b") == 10
    assert len(datasets[1]) >= 8 and len(datasets[2]) >= 8

    per_split = megatron_arguments(output)
    per_split.data_path = None
    per_split.train_data_path, per_split.valid_data_path = [prefixes[0]], [prefixes[1]]
    train, valid, test = gpt_datasets(per_split, (5, 5, 0))
    assert set(train[0]["tokens"].tolist()) == {ord("a")}
    assert set(valid[0]["tokens"].tolist()) == {ord("b")}
    assert test is None


def test_new_data_does_not_meet_the_sample_order_of_old(tool, tmp_path: Path) -> None:
    for texts in (["long " * 50] * 9, ["short"] * 9):
        source = write_jsonl(tmp_path / "in.jsonl", texts)
        _, output, _ = tool("--input", source, "--output-prefix", tmp_path / "o", "--append-eod")
        arguments = megatron_arguments(output)
        arguments.split = "1,0,0"
        dataset = gpt_datasets(arguments, (None, None, None))[0]
        num_tokens = sum(map(len, as_ids(texts)))
        assert len(dataset) == (num_tokens - 1) // 16


def test_output_does_not_depend_on_the_number_of_workers(tool, tmp_path: Path) -> None:
    texts = [f"{number} " * (number % 97) for number in range(3000)]
    source = write_jsonl(tmp_path / "in.jsonl", texts)
    stored = set()
    for num_workers in (1, 2, 3):
        prefix = tmp_path / f"o{num_workers}"
        code, *_ = tool("--input", source, "--output-prefix", prefix, "--workers", num_workers)
        assert code == 0
        pair = [prefix.with_name(f"{prefix.name}_text_document{end}") for end in (".bin", ".idx")]
        stored.add(tuple(path.read_bytes() for path in pair))
    assert len(stored) == 1
    assert read(tmp_path / "o1_text_document") == as_ids([t for t in texts if t], eod=False)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_error_names_the_line_whoever_meets_it(tool, tmp_path: Path, num_workers: int) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["text"] * 2000)
    with source.open("a") as stream:
        stream.write('{"body": "x", "title": "y"}\n')
    prefix = tmp_path / "out" / "o"
    code, _, error = tool("--input", source, "--output-prefix", prefix, "--workers", num_workers)
    assert code == 1
    assert f"{source}:2001: no key 'text' (keys there: 'body', 'title')" in error
    assert list(prefix.parent.iterdir()) == []


def bad_inputs(folder: Path) -> dict[str, tuple[list[object], str]]:
    """Return arguments and what the message must say, by name."""
    (folder / "empty").mkdir()
    (folder / "nothing.txt").write_text("")
    (folder / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (folder / "list.jsonl").write_text("[1]\n")
    (folder / "number.jsonl").write_text('{"text": 3}\n')
    (folder / "bad.gz").write_bytes(b"no gzip at all")
    whole = gzip.compress(os.urandom(1000))
    (folder / "cut.jsonl.gz").write_bytes(whole[:500])
    (folder / "model.json").write_text("{}")
    fine = folder / "fine.txt"
    fine.write_text("fine")
    out = ["--output-prefix", folder / "out" / "o"]
    bpe = ["--tokenizer-model", folder / "tokenizer"]
    return {
        "missing": (["--input", folder / "gone.txt", *out], "input does not exist"),
        "empty folder": (["--input", folder / "empty", *out], "choose others with --suffixes"),
        "no text": (["--input", folder / "nothing.txt", *out], "no text under 'text' in"),
        "not JSON": (["--input", folder / "bad.jsonl", *out], "bad.jsonl:2: not valid JSON"),
        "no object": (["--input", folder / "list.jsonl", *out], "list.jsonl:1: a JSON object"),
        "no string": (["--input", folder / "number.jsonl", *out], "number.jsonl:1: the value of"),
        "no gzip": (["--input", folder / "bad.gz", *out], "bad.gz: broken gzip"),
        "cut gzip": (["--input", folder / "cut.jsonl.gz", *out], "cut.jsonl.gz: broken gzip"),
        "plain text keys": (["--input", fine, *out, "--json-key", "a", "b"], "has no keys"),
        "unwritable": (
            ["--input", fine, "--output-prefix", fine / "o"],
            f"cannot write {fine}: ",
        ),
        "no tokenizer": (["--input", fine, *out, *bpe], "train one with --train-tokenizer"),
        "small vocabulary": (
            ["--input", fine, *out, *bpe, "--train-tokenizer", 100],
            "258 are needed",
        ),
        "no model": (
            ["--input", fine, *out, "--tokenizer-model", folder / "model.json"],
            "is no model of the tokenizers library",
        ),
    }


def test_messages(tool, tmp_path: Path) -> None:
    for name, (arguments, message) in bad_inputs(tmp_path).items():
        code, output, error = tool(*arguments)
        assert code == 1 and output == "", name
        assert error.startswith("error: ") and message in error, (name, error)
        assert not list((tmp_path / "out").glob("**/*")), name


def test_the_script_runs_anywhere_and_tells_mistakes_at_once(tmp_path: Path) -> None:
    arguments = ["--input", "gone.txt", "--output-prefix", "o"]
    result = subprocess.run(
        [sys.executable, "-X", "importtime", TOOL, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1 and result.stdout == ""
    assert "error: input does not exist: gone.txt" in result.stderr
    imported = {line.split("|")[-1].strip() for line in result.stderr.splitlines()}
    assert "tokenizers" in imported and "torch" not in imported


def test_wrong_usage(tool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--input", tmp_path, "--output-prefix", tmp_path / "o"]
    for extra, message in {
        ("--workers", "0"): "at least 1",
        ("--train-tokenizer", "300"): "need --tokenizer-model",
        ("--corpus", "stdlib"): "not allowed with",
        ("--json-key", "a", "a"): "twice",
    }.items():
        with pytest.raises(SystemExit) as exit_info:
            tool(*base, *extra)
        assert exit_info.value.code == 2
        assert message in capsys.readouterr().err


def hold(folder: Path, pid: int, act: Callable[[list[psutil.Process]], None]) -> None:
    """Feed folder/pipe.jsonl, call `act` with the workers once output is written, end the input."""
    with contextlib.suppress(BrokenPipeError), (folder / "pipe.jsonl").open("wb") as pipe:
        # More than fits in flight, so that some of it is written.
        pipe.write((json.dumps({"text": "some words " * 100}) + "\n").encode() * 12_000)
        pipe.flush()
        path = folder / f".o_text_document.{pid}.tmp.bin"
        deadline = time.monotonic() + 30
        while path.stat().st_size < 1000:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        children = psutil.Process(pid).children()
        workers = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
        act(workers)
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert len(workers) == 2 and not alive


@pytest.fixture
def job(tool, tmp_path: Path) -> list[object]:
    """Arguments of a job that reads from a pipe, where an older pair lies already."""
    source = write_jsonl(tmp_path / "old.jsonl", ["old"])
    tool("--input", source, "--output-prefix", tmp_path / "o")
    os.mkfifo(tmp_path / "pipe.jsonl")
    return ["--input", tmp_path / "pipe.jsonl", "--output-prefix", tmp_path / "o", "--workers", 2]


@pytest.mark.parametrize("event", [signal.SIGINT, signal.SIGTERM, "worker dies"])
def test_interruption_leaves_the_old_pair(
    tool, job, tmp_path: Path, event: signal.Signals | str
) -> None:
    def act(workers: list[psutil.Process]) -> None:
        if event == "worker dies":
            workers[0].kill()
        else:
            os.kill(os.getpid(), event)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        holder = pool.submit(hold, tmp_path, os.getpid(), act)
        code, _, error = tool(*job)
        holder.result(timeout=30)
    if event == "worker dies":
        assert code == 1 and error.startswith("error: a worker process died")
    else:
        assert (code, error) == (130, "interrupted\n")
    assert read(tmp_path / "o_text_document") == as_ids(["old"], eod=False)
    assert not list(tmp_path.glob(".*"))


def test_kill_leaves_the_old_pair_and_no_worker(job, tmp_path: Path) -> None:
    process = FORK.Process(target=preprocess_data.main, args=(list(map(str, job)),))
    process.start()
    try:
        hold(tmp_path, process.pid, lambda workers: process.kill() or process.join())
    finally:
        process.kill()
    assert process.exitcode == -signal.SIGKILL
    assert read(tmp_path / "o_text_document") == as_ids(["old"], eod=False)


def test_full_disk_leaves_the_old_pair(tool, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["old"])
    tool("--input", source, "--output-prefix", tmp_path / "o")
    write_jsonl(source, ["some words " * 100] * 2000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        code, _, error = tool("--input", source, "--output-prefix", tmp_path / "o")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (code, error) == (1, f"error: cannot write {tmp_path / 'o'}: File too large\n")
    assert read(tmp_path / "o_text_document") == as_ids(["old"], eod=False)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("model", ["tokenizer", "folder/tokenizer.json", "mine.json"])
def test_trained_bpe_is_megatrons(tool, tmp_path: Path, model: str) -> None:
    texts = [f"the quick brown fox {number} jumps — 日本 🙂\n" for number in range(200)]
    texts.append("the end<|endoftext|>is a word here<|pad|>")
    source = write_jsonl(tmp_path / "in.jsonl", texts)
    bpe = ["--tokenizer-model", tmp_path / model]
    code, output, error = tool(
        *["--input", source, "--output-prefix", tmp_path / "o", "--append-eod"],
        *[*bpe, "--train-tokenizer", 400, "--workers", 2],
    )
    assert code == 0, error
    arguments = megatron_arguments(output)
    assert arguments.tokenizer_type == "HuggingFaceTokenizer"
    theirs = build_tokenizer(arguments)
    stored = read(tmp_path / "o_text_document")
    assert theirs.vocab_size == 400 and arguments.padded_vocab_size == 512
    assert f"end of document {theirs.eod}\n" in output
    assert theirs.pad not in (theirs.eod, None)
    for text, ids in zip(texts, stored, strict=True):
        # Only the last id ends the document, even if the text spells that token.
        assert ids.index(theirs.eod) == len(ids) - 1 and theirs.pad not in ids
        assert theirs.detokenize(ids[:-1]) == text
    assert [theirs.tokenize(text) for text in texts[:-1]] == [ids[:-1] for ids in stored[:-1]]
    assert sum(map(len, stored)) < sum(map(len, as_ids(texts))) / 2
    arguments.split = "90,10,0"
    train, valid, _ = gpt_datasets(arguments, (10, 2, 0))
    assert int(train[0]["tokens"].max()) < 400 and len(valid) >= 2

    # Read again rather than trained, it gives the same pair.
    again = ["--input", source, "--output-prefix", tmp_path / "again", "--append-eod", *bpe]
    code, *_ = tool(*again)
    assert code == 0
    assert read(tmp_path / "again_text_document") == stored


def test_foreign_bpe_needs_an_eod_token_and_adds_no_other(tool, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["some text, some words"] * 9)
    arguments = ["--input", source, "--output-prefix", tmp_path / "o", "--append-eod"]
    tool(*arguments, "--train-tokenizer", 260, "--tokenizer-model", tmp_path / "first.json")
    model = HFTokenizer.from_str(
        (tmp_path / "first.json").read_text().replace("<|endoftext|>", "<stop>")
    )
    begin = ("<|pad|>", model.token_to_id("<|pad|>"))
    model.post_processor = TemplateProcessing(single="<|pad|> $A", special_tokens=[begin])
    (tmp_path / "other").mkdir()
    model.save(str(tmp_path / "other" / "tokenizer.json"))
    arguments += ["--tokenizer-model", tmp_path / "other"]
    code, _, error = tool(*arguments)
    assert code == 1 and "Say it with --eod-token" in error
    code, output, error = tool(*arguments, "--eod-token", "<stop>")
    assert code == 0, error
    eod = build_tokenizer(megatron_arguments(output)).eod
    for ids in read(tmp_path / "o_text_document"):
        assert ids[-1] == eod and begin[1] not in ids
    assert load_bpe(tmp_path / "other").eod == eod
    code, _, error = tool(*arguments, "--eod-token", "<|pad|>")
    assert code == 1 and "says eos_token '<stop>', not '<|pad|>'" in error


def test_bpe_training_is_deterministic(tool, tmp_path: Path) -> None:
    models = []
    for name in ("a", "b"):
        arguments = ["--input", TOOL.parent, "--suffixes", ".py", "--output-prefix"]
        arguments += [tmp_path / name, "--tokenizer-model", tmp_path / f"{name}.json"]
        code, *_ = tool(*arguments, "--train-tokenizer", 1000)
        assert code == 0
        models.append((tmp_path / f"{name}.json").read_bytes())
    assert models[0] == models[1]


def test_default_corpus_is_made_once(tmp_path: Path) -> None:
    prefix = prepare_default(tmp_path)
    assert prefix == str(tmp_path / "stdlib_byte_text_document")
    files = [Path(prefix + end) for end in (".bin", ".idx")]
    first = [path.stat().st_mtime_ns for path in files]
    documents = read(Path(prefix))
    records = [record for record in StdlibCorpus() if record.data]
    assert documents == [[*record.data, EOD] for record in records]
    names = [record.source for record in records]
    assert {"abc.py", "pydoc_data/topics/lambda", "json/decoder.py"} < set(names)
    assert names == sorted(names) and not any(name.startswith("test/") for name in names)
    assert 8e6 < sum(len(record.data) for record in records) < 16e6

    prepare_default(tmp_path)
    assert [path.stat().st_mtime_ns for path in files] == first
    prepare_default(tmp_path, append_eod=False)
    assert read(Path(prefix)) == [document[:-1] for document in documents]
    prepare_default(tmp_path)
    files[0].write_bytes(b"damaged")
    prepare_default(tmp_path)
    assert read(Path(prefix)) == documents


def prepare_and_tell(folder: Path, answers: Any) -> None:
    made: list[int] = []
    prefix = prepare_default(folder, on_progress=made.append)
    answers.put((prefix, bool(made)))


def test_default_corpus_with_several_processes_at_once(tmp_path: Path) -> None:
    answers = FORK.Queue()
    processes = [FORK.Process(target=prepare_and_tell, args=(tmp_path, answers)) for _ in range(3)]
    for process in processes:
        process.start()
    prefixes, made = zip(*(answers.get(timeout=60) for _ in processes), strict=True)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert len(set(prefixes)) == 1 and sorted(made) == [False, False, True]
    assert len(read(Path(prefixes[0]))) > 500
