"""Attention over plain and encoded blocks as CUDA kernels.

place.cu, queries.cu     who a thread is, what its thread block reads, and which queries are its own
plain.cu, encoded.cu     the parts of plain and of encoded blocks
alone.cu, encoded_alone.cu   after these, where each row reads for itself: a row's parts are joined by the thread block
                         that ends last (last.cu tells which)
join.cu, encoded_join.cu where rows read together: a kernel of its own joins each row's parts
store.cu, encoded_store.cu   new tokens are stored before any row reads
rope.cu, codes.cu        RoPE of what is loaded; codes are read, turned and made
"""
