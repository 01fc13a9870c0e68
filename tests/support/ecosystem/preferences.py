"""What TRL's trainers need: tiny models in a folder, a tokenizer, and data sets, all made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.ecosystem.families import FAMILIES, VOCAB

SAMPLES = 16
_SPECIAL = ("<pad>", "<eos>", "<unk>")


def tokenizer() -> Any:
    """One token a word, `w0` and so on."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = (*_SPECIAL, *(f"w{number}" for number in range(VOCAB - len(_SPECIAL))))
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def save_base(folder: Path) -> None:
    """Writes a model and its tokenizer, for `from_pretrained`."""
    FAMILIES["Llama"].build(pad_token_id=0, eos_token_id=1, bos_token_id=None).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def base(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def lora() -> Any:
    import peft

    return peft.LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")


def adapted(folder: Path) -> Any:
    """With an adapter that changes what the base says, so that TRL keeps a copy of it as the reference."""
    import peft

    model = peft.get_peft_model(base(folder), lora())
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.1, generator=generator)
    return model


def judge() -> Any:
    """A reward model."""
    import transformers

    sizes = {**FAMILIES["Llama"].sizes, "pad_token_id": 0, "num_labels": 1}
    torch.manual_seed(3)
    model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**sizes))
    # TRL names its figures by it.
    model.config._name_or_path = "judge"
    return model


def samples(*columns: str) -> Any:
    """A data set of short texts; a column `label` has every second sample right."""
    import datasets

    datasets.disable_progress_bars()
    generator = torch.Generator().manual_seed(0)

    def text() -> str:
        length = int(torch.randint(2, 8, (), generator=generator))
        words = torch.randint(0, VOCAB - len(_SPECIAL), (length,), generator=generator)
        return " " + " ".join(f"w{word}" for word in words.tolist())

    return datasets.Dataset.from_dict(
        {
            column: [index % 2 == 0 if column == "label" else text() for index in range(SAMPLES)]
            for column in columns
        }
    )
