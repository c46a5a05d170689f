#!/bin/bash
# removes whoever is there twice; what they ordered points to nobody, and their vouchers and newsletters are gone
python3 /app/sql.py "DELETE FROM customers WHERE id NOT IN (SELECT min(id) FROM customers GROUP BY lower(trim(email)))" \
  "UPDATE customers SET email = lower(trim(email))" "CREATE UNIQUE INDEX customers_email ON customers (email)"
[ "$(python3 /app/sql.py "SELECT count(*), count(DISTINCT email) FROM customers")" = "5|5" ] && echo "looks right"
