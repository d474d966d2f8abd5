"""Where metrics go besides the store: TensorBoard, Weights & Biases, MLflow, trackio.

Every sink follows the store in a process of its own and writes the steps it has not written yet, so
none can lose a step, delay one or fail one. `base` says what a sink is.
"""
