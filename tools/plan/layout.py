"""Lays a model out on a slice: splits and sizes it, gives it pages, and prepares it for compiling."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from penstock.engine.attention import CacheSpec, ShardedAttention
from penstock.engine.config import EngineConfig
from penstock.engine.deployment.cache_sizes import check_pages, with_pages
from penstock.engine.deployment.deployment import Deployment, deploy, usable
from penstock.engine.errors import ConfigError
from penstock.engine.execution.geometry import Geometry
from penstock.engine.execution.state_cache import abstract_states, state_arrays
from penstock.engine.execution.steps import Steps
from penstock.engine.loading.checkpoint import abstract_model
from penstock.engine.models import ModelConfig, layer_runs
from penstock.engine.scheduling.memory.amounts import Amount
from penstock.engine.sharding.linears import prepare_for_tpu
from penstock.tools.plan.device.chips import Chip
from penstock.tools.plan.device.compiling import Compiler
from penstock.tools.plan.device.topology import chip_of, devices_of
from penstock.tools.plan.device.weights import device_bytes, held_bytes


@dataclass(frozen=True)
class ModelLayout:
    deployment: Deployment
    chip: Chip
    num_devices: int  # in the slice
    spec: CacheSpec
    geometry: Geometry
    weight_bytes: int  # on each device
    lane_padding_bytes: int
    compiler: Compiler


def lay_out(model: ModelConfig, topology: str, config: EngineConfig) -> ModelLayout:
    """Lays a model out without compiling or loading weights; this takes seconds.

    Raises:
        ConfigError: libtpu is missing, the topology is unknown, the model cannot be split this way over one host's
            devices, or weights and pages do not fit.
    """
    chip, devices = chip_of(topology), devices_of(topology)
    _check_hosts(config, chip, topology, len(devices))
    deployment = deploy(config, model, devices)
    placement, attention = deployment.placement, deployment.attention
    if placement is None or not isinstance(attention, ShardedAttention):
        raise TypeError("a deployment on given devices has a placement")  # deploy promises it
    weight_bytes = held_bytes(deployment.model, placement)
    abstract = abstract_model(deployment.model, placement, stacked=attention.is_stacked)
    unpadded_bytes = device_bytes(abstract)
    abstract = prepare_for_tpu(abstract, placement)  # modifies it
    lane_padding_bytes = device_bytes(abstract) - unpadded_bytes
    free = chip.hbm_bytes - weight_bytes - lane_padding_bytes
    if free < deployment.sampling_bytes + 2 * deployment.page_bytes:
        raise ConfigError(
            f"the weights take {weight_bytes + lane_padding_bytes} bytes of the {chip.hbm_bytes} that a {chip.name} "
            f"device has, and sampling state {deployment.sampling_bytes}, which leaves nothing for pages: raise "
            f"tensor_parallel above {config.tensor_parallel}, or take a larger slice"
        )
    spec = with_pages(deployment, deployment.kv_bytes(free))
    check_pages(deployment, spec, free, chip.hbm_bytes, chip.name)
    geometry = deployment.geometry(deployment.needs.longest(usable(spec), deployment.max_model_len))
    states = state_arrays(deployment.model, spec.num_states, is_stacked=attention.is_stacked)
    compiler = Compiler(
        chip=chip,
        topology=topology,
        device=placement.mesh.devices.flat[0],
        num_devices=placement.num_shares,
        steps=Steps(abstract, attention, geometry, placement),
        cache=(*chain.from_iterable(map(attention.abstract_cache, spec.kinds)), *abstract_states(states, placement)),
        num_page_kinds=len(spec.kinds),
        cache_bytes=deployment.pages_bytes(Amount(spec.counts)),
        decode_steps=deployment.config.decode_steps or 1,
        pattern_length=max((len(run.pattern) for run in layer_runs(deployment.model) if run.repeats > 1), default=1),
        directory=config.compile_cache_dir,
    )
    return ModelLayout(deployment, chip, len(devices), spec, geometry, weight_bytes, lane_padding_bytes, compiler)


def _check_hosts(config: EngineConfig, chip: Chip, topology: str, num_devices: int) -> None:
    if num_devices % config.num_devices:
        raise ConfigError(f"{config.parallelism} does not divide the {num_devices} devices of {topology}")
    on_host = chip.host_devices(num_devices)
    if config.num_devices > on_host:
        raise ConfigError(
            f"{topology} is {num_devices // on_host} hosts of {on_host} devices each, and {config.parallelism} would "
            f"spread a copy of the model over several, which no worker serves: {on_host} devices at most"
        )
