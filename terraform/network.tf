# A gateway endpoint costs nothing by the hour and keeps the cache's traffic off the NAT gateway.

resource "aws_vpc_endpoint" "this" {
  count = var.gateway_endpoint == null ? 0 : 1

  vpc_id            = var.gateway_endpoint.vpc_id
  service_name      = "com.amazonaws.${aws_s3_bucket.this.region}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = var.gateway_endpoint.route_table_ids
  policy            = module.policies.endpoint_policy
  tags              = merge({ Name = "ec-s3-${var.bucket_name}" }, var.tags)
}
