"""Random models, machines, profiles, scenarios and partitions for tests of laws that hold for all of them.

`any_scenario(rng)` builds a scenario from random draws; `scenarios()` is the Hypothesis strategy that does the same.
Other builders follow this pattern. Their ranges are wider than those of machines on sale.
"""

from tests.building.drawing import Drawn, Draws, draws, log, maybe, strategy_of, tokens
from tests.building.effort import examples
from tests.building.machines import any_cluster, any_gather_rates, any_gpu, any_link, clusters, gpus, plain
from tests.building.models import any_model, models, products_of, weights_of
from tests.building.profiles import any_operation, any_profile
from tests.building.rates import any_blocked, any_eager, any_elementwise, any_experts, any_flash, any_gemm, any_sizes
from tests.building.scenarios import (
    any_divisible,
    any_engine,
    any_partition,
    any_placed,
    any_rows,
    any_run,
    any_scenario,
    as_measured,
    executed,
    faster,
    measured_scenarios,
    partitions,
    scenario_in,
    scenarios,
)
