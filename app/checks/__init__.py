"""What is looked at before anything starts, by `make serve`, `serve run` and `crosskv check`.

before_start.py   every check of a configuration, in order, and what one answers
model_files.py    the model's folder: all files whole, none a pointer of Git LFS
architecture.py   whether the model answers chats, by vLLM's list of architectures
chat_template.py  whether there is a chat template that works
template_trial.py what templates make of a message, in a process that ends one without an end
parsers.py        names that vLLM has to know: parsers, methods of quantization
vllm_source.py    such names, out of vLLM's source

Each takes a second at most, for it imports neither Ray, torch, transformers nor vLLM. What is wrong is one sentence
(`SettingsError`) that names the setting or the file, and what would work. A hub's model is looked at when it is loaded.
"""
