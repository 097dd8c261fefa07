"""A whole run in one process: acting, replay and learning take turns, so that a seed decides every number."""
