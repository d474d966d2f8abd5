from pathlib import Path

from tests.environments.figures import print_figures

print_figures("tau2:airline", Path(__file__).parent)
