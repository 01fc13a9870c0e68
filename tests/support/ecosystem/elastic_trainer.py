"""A program with `FlatTrainer` and lanes that goes on from its newest checkpoint, on any number of ranks."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.support.ecosystem.families import FAMILIES, Text
from tests.support.ecosystem.launched import trainer_options

MICROBATCHES, EPOCHS, SAVE_EVERY = 8, 8, 3
STEPS = 3 * EPOCHS
"""An epoch of 20 samples has steps of 8, 8 and 4."""


def main(folder: Path) -> None:
    """Trains; the first rank prints figures of each step, before it is saved, and the weights' hash."""
    transformers = importlib.import_module("transformers")
    flatfsdp = importlib.import_module("flatfsdp.compat.transformers.trainer")

    class Printed(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
            if state.is_world_process_zero and "loss" in logs:
                figures = {name: logs[name] for name in ("loss", "grad_norm")}
                print(json.dumps({"step": state.global_step, **figures}), flush=True)

    options = trainer_options(
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=MICROBATCHES // int(os.environ["WORLD_SIZE"]),
        save_strategy="steps",
        save_steps=SAVE_EVERY,
        max_grad_norm=0.1,
    )
    trainer = flatfsdp.FlatTrainer(
        FAMILIES["Llama"].build(),
        transformers.TrainingArguments(output_dir=str(folder), **options),
        train_dataset=Text(),
        flat=flatfsdp.FlatArguments(lanes=4),
        callbacks=[Printed()],
    )
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    found = hashlib.sha256()
    # Collective: every rank gets whole values.
    for value in trainer.model.state_dict().values():
        found.update(value.contiguous().numpy().tobytes())
    if trainer.is_world_process_zero():
        print(json.dumps({"weights": found.hexdigest()}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
