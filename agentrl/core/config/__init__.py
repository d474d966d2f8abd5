"""Settings: the run file as typed, validated values.

`schema` has the run file as a class, whose tables are in `agents`, `learning`, `rewards`,
`infrastructure` and `live`; `run_file` reads and writes it, `validate` checks keys and combinations
of settings, `derived` has what follows from them: hints at mistakes, environments, names of
presets, and the settings of each of several policies.
"""

from agentrl.core.config.agents import AgentConfig as AgentConfig
from agentrl.core.config.agents import RoleRule as RoleRule
from agentrl.core.config.agents import UpstreamConfig as UpstreamConfig
from agentrl.core.config.base import Count as Count
from agentrl.core.config.base import Natural as Natural
from agentrl.core.config.base import Positive as Positive
from agentrl.core.config.base import Section as Section
from agentrl.core.config.infrastructure import RunnerConfig as RunnerConfig
from agentrl.core.config.infrastructure import TorchLearnerConfig as TorchLearnerConfig
from agentrl.core.config.learning import AlgorithmConfig as AlgorithmConfig
from agentrl.core.config.learning import LoraConfig as LoraConfig
from agentrl.core.config.learning import PolicyConfig as PolicyConfig
from agentrl.core.config.run_file import differences as differences
from agentrl.core.config.run_file import from_store as from_store
from agentrl.core.config.run_file import load as load
from agentrl.core.config.run_file import resolve as resolve
from agentrl.core.config.run_file import store_in as store_in
from agentrl.core.config.run_file import store_of as store_of
from agentrl.core.config.run_file import to_toml as to_toml
from agentrl.core.config.schema import RunConfig as RunConfig
