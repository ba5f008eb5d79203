"""Attention over plain and encoded blocks as CUDA kernels.

place.cu, queries.cu     a thread's position, what its thread block reads, and which queries are its own
plain.cu, encoded.cu     compute the parts of plain and of encoded blocks
alone.cu, encoded_alone.cu   follow these if each row reads separately: a row's parts are joined by the thread block
                         that finishes last (last.cu determines which)
join.cu, encoded_join.cu a separate kernel that joins each row's parts if rows read together
store.cu, encoded_store.cu   store new tokens before any row reads
rope.cu, codes.cu        RoPE of what is loaded; reading, rotating and encoding codes
"""
