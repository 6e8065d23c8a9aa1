"""Prefills of Hugging Face models over torch.distributed, with the simulator's partitions."""

from kvrsim.io.files import use_no_compiler_cache

use_no_compiler_cache()
