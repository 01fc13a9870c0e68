"""transformers' Trainer, and its Seq2SeqTrainer, with FlatFSDP as the engine.

flat_arguments   `FlatArguments`: options beyond TrainingArguments, and checks of these
trainer          `FlatTrainer`, `FlatSeq2SeqTrainer`: shard, train, save, resume
"""

from flatfsdp.compat.transformers.trainer.flat_arguments import FlatArguments
from flatfsdp.compat.transformers.trainer.trainer import FlatSeq2SeqTrainer, FlatTrainer

__all__ = ["FlatArguments", "FlatSeq2SeqTrainer", "FlatTrainer"]
