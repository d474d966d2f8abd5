"""Metrics sinks besides the store: TensorBoard, Weights & Biases, MLflow, trackio, or your own.

`base` defines the protocol; `process` follows the store and writes new steps to the sinks.
"""
