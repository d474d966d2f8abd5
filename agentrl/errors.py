"""Every error a user can meet: one class per boundary, and the message says what to do next."""


class AgentRLError(Exception):
    """Base of all errors raised on purpose; the command line prints the message alone."""


class ConfigError(AgentRLError):
    """A run file, task file, agent path or command-line override is wrong."""


class StoreError(AgentRLError):
    """The store cannot be opened or refused a verb."""


class Fenced(StoreError):
    """The caller's lease, fence or run epoch is no longer the current one."""


class AgentError(AgentRLError):
    """The user's agent or verifier could not be loaded."""


class PolicyError(AgentRLError):
    """A model directory, tokenizer, chat template or policy server is unusable."""


class TrainingError(AgentRLError):
    """An update cannot be computed from the data at hand."""
