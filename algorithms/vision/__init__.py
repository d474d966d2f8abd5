"""Image-text policies: their models, images as token ids, and how they join a training run."""
