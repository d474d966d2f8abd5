from pathlib import Path

from tests.environments.figures import print_figures

print_figures("verifiers-v1:words_taskset", Path(__file__).parent)
