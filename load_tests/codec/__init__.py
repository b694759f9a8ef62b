"""The codecs compared (`make bench-codec`), and a model's profile measured (`make profile-codec`)."""
