"""What holds for every test: one thread a process, no network. Profiles, and the marker `gpu`, are of weft's plugin."""

import os

import torch

pytest_plugins = ["weft.proofs.plugin"]

# huggingface_hub reads these when it is first imported, which is later; processes that tests start inherit them.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}

# The models are small, and the workers of pytest-xdist share the cores.
torch.set_num_threads(1)
