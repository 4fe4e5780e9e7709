"""Training data: from text to Megatron's .bin/.idx, and from those to microbatches by id.

* `corpus`: documents from text, folders, jsonl, gzip, or the interpreter's standard library.
* `tokenizer`: byte level or a local BPE, both usable by Megatron's own flags.
* `encode`, `indexed`, `build`: several processes in a fixed order, and atomic output.
* `default`: the corpus that needs no network.
* `loader`: random access to the microbatches of a step, for `--dataloader-type external`.

The command-line tool is `tools/preprocess_data.py`. See docs/data.md.
"""

from megatron_ft.data.default import prepare_default

__all__ = ["prepare_default"]
