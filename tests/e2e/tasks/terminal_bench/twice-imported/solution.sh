#!/bin/bash
python3 /app/sql.py \
  "CREATE TEMP TABLE person AS SELECT id, min(id) OVER (PARTITION BY lower(trim(email))) AS kept FROM customers" \
  "UPDATE customers SET name = (SELECT c.name FROM customers c JOIN person p USING (id) WHERE coalesce(c.name, '') != '' AND
     p.kept = (SELECT kept FROM person WHERE person.id = customers.id) ORDER BY c.imported DESC LIMIT 1)" \
  "UPDATE orders SET customer = (SELECT kept FROM person WHERE id = customer)" \
  "UPDATE vouchers SET given_to = (SELECT kept FROM person WHERE id = given_to)" \
  "UPDATE OR IGNORE newsletters SET customer = (SELECT kept FROM person WHERE id = customer)" \
  "DELETE FROM customers WHERE id NOT IN (SELECT kept FROM person)" \
  "UPDATE customers SET email = lower(trim(email))" \
  "CREATE UNIQUE INDEX customers_email ON customers (email)" "DROP TABLE person"
