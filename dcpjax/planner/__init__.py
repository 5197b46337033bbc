"""Plans and simulations of deployments, without devices and without JAX.

From a model, a device and a demand: does it fit (``capacity``), what moves (``traffic``,
``transfer_cost``), how long steps take (``decode_step``, ``prefill_step``), which cluster is best
(``search``), and what a trace does to it (``simulate``). Every constant says where it comes from.
"""

from dcpjax.planner.cache_parts import kv_bytes_per_token as kv_bytes_per_token
from dcpjax.planner.cache_parts import kv_parts as kv_parts
from dcpjax.planner.candidates import Candidate as Candidate
from dcpjax.planner.crossover import dcp_crossover as dcp_crossover
from dcpjax.planner.demand import Demand as Demand
from dcpjax.planner.demand import parse_size as parse_size
from dcpjax.planner.deployment import Deployment as Deployment
from dcpjax.planner.engine_words import parse_engines as parse_engines
from dcpjax.planner.generate import Workload as Workload
from dcpjax.planner.generate import generate_trace as generate_trace
from dcpjax.planner.hardware import find_device as find_device
from dcpjax.planner.hardware import known_devices as known_devices
from dcpjax.planner.memory import Capacity as Capacity
from dcpjax.planner.memory import capacity as capacity
from dcpjax.planner.models import find_model as find_model
from dcpjax.planner.models import known_models as known_models
from dcpjax.planner.roofline import index_read_crossover as index_read_crossover
from dcpjax.planner.roofline import indexer_crossover as indexer_crossover
from dcpjax.planner.roofline import model_intensity as model_intensity
from dcpjax.planner.search import search as search
from dcpjax.planner.shaped_steps import ShapedSteps as ShapedSteps
from dcpjax.planner.shaped_steps import fit_shapes as fit_shapes
from dcpjax.planner.shaped_steps import read_steps as read_steps
from dcpjax.planner.sim_build import build_cluster as build_cluster
from dcpjax.planner.sim_cluster import Cluster as Cluster
from dcpjax.planner.sim_cluster import Failure as Failure
from dcpjax.planner.sim_report import Objective as Objective
from dcpjax.planner.sim_step import EngineSpec as EngineSpec
from dcpjax.planner.simulate import simulate as simulate
from dcpjax.planner.step_times import ConstantSteps as ConstantSteps
from dcpjax.planner.step_times import EstimatedSteps as EstimatedSteps
from dcpjax.planner.step_times import fit_steps as fit_steps
from dcpjax.planner.steps import decode_step as decode_step
from dcpjax.planner.steps import prefill_step as prefill_step
from dcpjax.planner.traces import hit_tokens as hit_tokens
from dcpjax.planner.traces import load_trace as load_trace
from dcpjax.planner.traffic import traffic as traffic
from dcpjax.planner.transfers import naive_bytes as naive_bytes
from dcpjax.planner.transfers import transfer_cost as transfer_cost
