"""`poros verify`: a user's own run, streamed, repeated, restarted and resident, compared byte for byte."""
