-- name: lock_references
lock table rollout_images, side_images in share row exclusive mode;
