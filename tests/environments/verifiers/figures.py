from pathlib import Path

from tests.environments.figures import print_figures

print_figures("verifiers:words_env", Path(__file__).parent)
