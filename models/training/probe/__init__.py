"""Fine-tuning of the probe model, whose answers need KV that crosses documents; see `models/README.md`."""
