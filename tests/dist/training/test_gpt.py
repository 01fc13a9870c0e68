"""The training loop with what comes between steps: on CPUs microbatches that are to be replayed are eager."""

from __future__ import annotations

from dataclasses import replace

import torch

from flatfsdp.comm.launch import Rank
from flatfsdp.models.gpt import GPTConfig
from flatfsdp.parity.loop import train
from flatfsdp.training.choices import PrecisionName
from flatfsdp.training.jobs import Configuration, Settings, gpt_job
from tests.support.ranks import on_ranks

SETTINGS = Settings(GPTConfig(1, 32, 2, 16), batch=2, microbatches=2, steps=17)
CONFIGURATION = Configuration(None, PrecisionName.fp8_delayed)


@on_ranks(2)
def test_interruptions_leave_training_whole() -> None:
    rank = Rank(torch.distributed.get_rank(), 2, torch.device("cpu"))
    job = gpt_job(SETTINGS, CONFIGURATION, SETTINGS.sampler(), rank, interrupts=True)
    sharding = replace(CONFIGURATION.sharding, cache=False)
    eager = train(job.trainee, sharding, rank)
    replayed = train(job.trainee, replace(sharding, replay=True), rank)
    assert eager.summary.losses == replayed.summary.losses
    plain = train(replace(job, interrupts=False).trainee, sharding, rank)
    # An evaluation before step 3 changes nothing; half of the sequences in step 11 do.
    assert eager.summary.losses[:7] == plain.summary.losses[:7]
    assert eager.summary.losses[11] != plain.summary.losses[11]
    # Before step 15 the parameters of step 3 came back.
    assert eager.summary.losses[15] > max(eager.summary.losses[12:15])
