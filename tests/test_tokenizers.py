"""Megatron's tokenizers are imported without transformers where the job needs none of it."""

from __future__ import annotations

import json
import subprocess
import sys

from harness import ROOT

PROGRAM = """
import json, os, sys
os.environ.update(TORCHDYNAMO_DISABLE="1", HF_HUB_OFFLINE="1")
from megatron_ft.patches.registry import registry
from megatron_ft.patches import cpu_device, tokenizers
registry.install(cpu_device.PATCHES)
registry.install(tokenizers.PATCHES)
from types import SimpleNamespace
from megatron.training import global_vars
args = SimpleNamespace(
    tokenizer_type="{kind}", vocab_size=256, rank=1, make_vocab_size_divisible_by=1,
    tensor_model_parallel_size=1, padded_vocab_size=None, tokenizer_model="nowhere",
    metadata_path=None, special_tokens=None, vocab_file=None, merge_file=None, chat_template=None,
    tokenizer_hf_no_use_fast=False, tokenizer_hf_no_include_special_tokens=False,
    trust_remote_code=False, pad_vocab_size=True,
)
try:
    global_vars.build_tokenizer(args)
    built = True
except Exception as error:
    built = str(error)
loaded = "transformers" in sys.modules
import transformers
from megatron.core.tokenizers.text.libraries import huggingface_tokenizer
print(json.dumps({{
    "built": built,
    "loaded": loaded,
    "there": transformers.__name__,
    "have": huggingface_tokenizer.HAVE_TRANSFORMERS,
}}))
"""


def tokenizer(kind: str) -> dict[str, object]:
    command = [sys.executable, "-c", PROGRAM.format(kind=kind)]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_one_that_needs_none_is_built_without() -> None:
    told = tokenizer("NullTokenizer")
    # Whoever else asks for it gets it.
    assert told == {"built": True, "loaded": False, "there": "transformers", "have": False}


def test_one_that_needs_it_gets_it() -> None:
    told = tokenizer("HuggingFaceTokenizer")
    assert told["have"] and told["loaded"], told
    assert "nowhere" in str(told["built"]), "transformers itself says what is missing"
