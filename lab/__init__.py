"""The laboratory: servers, models and demos that benches and tests share. It is in no package."""
