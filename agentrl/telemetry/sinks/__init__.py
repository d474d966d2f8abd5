"""Where metrics go besides the store: TensorBoard, Weights & Biases, MLflow, trackio, or your own.

`base` says what a sink is; `process` follows the store and writes the steps that a sink does not
have yet.
"""
