"""Workers in processes of their own: started, watched, replaced and fed with batches."""
