"""An OpenRLHF command line as a pipeline file: what its flags mean (flags, spellings) and what they become here."""
